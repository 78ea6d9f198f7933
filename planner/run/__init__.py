"""What is best on one mesh? Baselines and pins restrict it."""
