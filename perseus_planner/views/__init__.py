"""How values are seen beside text and the report: figures, traces, notebooks, pandas frames."""
