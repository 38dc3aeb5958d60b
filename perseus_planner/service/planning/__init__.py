"""From decisions to plans. `Planning` looks them up, or has worker processes solve and plan
them.
"""
