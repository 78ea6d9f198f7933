"""Plans written from decisions, and existing plans read and priced again.

a plan, from a decision          write.write_plan, .write_pipeline_plan
a price, from a plan             reprice.open_for_pricing
its seconds and bytes, by parts  breakdown.breakdown
names: patterns of FQNs          fqn_entries
names of mesh axes               axis_names
notes on a plan                  notes.notes_on
techniques of a plan             techniques.used_techniques
"""
