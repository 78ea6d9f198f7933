"""What is best? A module becomes a graph, strategies, costs, an integer program and a plan."""
