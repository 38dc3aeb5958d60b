"""All that must survive the service: its database."""
