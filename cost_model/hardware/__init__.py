"""What is there? Devices, links and clusters, and what was measured on them."""
