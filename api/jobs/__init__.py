"""Planning jobs: their store, their queue, and the workers that solve them."""
