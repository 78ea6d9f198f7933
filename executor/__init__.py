"""How is a plan run? Plan and module become a DTensor module, and the collectives that it runs are counted."""
