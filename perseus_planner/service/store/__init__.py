"""The service's database. `Storage` reads and writes it; `Writer` is the one thread that changes
it.
"""
