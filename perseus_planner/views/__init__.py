"""Everything that people look at: tables, figures, Perfetto traces and the report page.

`curves`, `plan` and `run` hold the summaries that the commands print, as JSON and as text. Only the
commands import this folder.
"""
