"""The Python client of the service. `Client` asks the service; `sources` makes reports of what
others detect.
"""
