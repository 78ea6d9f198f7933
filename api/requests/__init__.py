"""Requests: checked, with their models and clusters read, and planned."""
