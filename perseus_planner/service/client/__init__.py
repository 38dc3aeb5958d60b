"""For who asks the service: its client, and reports of others as it takes them."""
