"""The service: stragglers reported, every pipeline brought to the point of its frontier that fits."""
