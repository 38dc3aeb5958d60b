"""The service: takes reports of stragglers and gives every pipeline a plan at the point of its
frontier that fits.

Others use `client.client.Client`, the values in `model` and the requests in `schemas`;
`planner serve` uses `service.Service`, `store.storage.Storage` and `http.server`.
"""
