"""Stages from torch modules."""
