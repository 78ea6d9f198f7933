"""What is alive when? The points of a step at which memory can peak, and the tensors alive at each."""
