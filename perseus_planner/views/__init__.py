"""Everything that people look at: tables, figures, Perfetto traces and the report page.

`profiles`, `frontier`, `plan`, `run` and `cluster` hold the summaries that the commands print, as
JSON and as text. Only the commands import this folder.
"""
