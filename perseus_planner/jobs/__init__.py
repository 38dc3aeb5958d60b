"""Job files: profiles, schedule and options of one training job, and the calibration of its iteration time."""
