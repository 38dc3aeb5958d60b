"""The service's part in a training job: rank 0 follows the service's plans and reports what the
ranks detect and count.

Others use `agent.ServiceLink` and `settings.ServiceSettings`.
"""
