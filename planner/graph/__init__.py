"""What is computed? A module is traced to an `OpGraph`; of equal blocks only three are traced."""
