"""`planner report`: one self-contained HTML page of a profile, a frontier, plans and runs.

`sources` reads the files, `report` makes the values that the page shows, and `page` writes the
page.
"""
