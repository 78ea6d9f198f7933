"""Where may layouts change? The graph's ops between module boundaries, grouped into regions and blocks."""
