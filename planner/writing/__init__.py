"""How does a decision become a plan, and a plan a price again?"""
