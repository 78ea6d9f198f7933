"""Where may layouts change? The ops between module boundaries, grouped into regions and blocks."""
