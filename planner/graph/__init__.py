"""What is computed? A module becomes an `OpGraph`: traced, with equal blocks folded."""
