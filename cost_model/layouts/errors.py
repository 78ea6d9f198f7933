"""`LayoutError`, apart from layouts themselves, so that who reports it needs no torch."""


class LayoutError(ValueError):
    """A mesh or a layout that is not possible; the message names the input and the accepted forms."""
