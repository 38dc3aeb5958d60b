"""The dashboard: a page that shows the jobs of the service, and its files. `routes` serves them."""
