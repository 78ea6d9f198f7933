"""How does a decision become a plan, and a plan a price again?

a plan, from a decision    write.write_plan, .write_pipeline_plan
a price, from a plan       reprice.open_for_pricing
names: patterns of FQNs    fqn_entries
what figures do not say    notes.notes_on
"""
