"""Training jobs: read a job file (`settings`), make its pipelines (`job`), and calibrate it
(`calibration`).
"""
