"""The service's part in a training job: rank 0 follows its plans and passes on what ranks find."""
