"""What is asked for: requests checked, models and clusters read, plans made of them."""
