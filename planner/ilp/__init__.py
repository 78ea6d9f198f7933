"""The integer program and its solution; knows neither graphs nor layouts."""
