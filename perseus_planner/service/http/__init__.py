"""The service over HTTP. `server.listening` and `server.serve` run it; `app.create_app` makes
the application.
"""
