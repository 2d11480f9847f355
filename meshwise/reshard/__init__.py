"""Moving tensors from one layout to another: who holds which index ranges, who sends what.

``regions`` describes a layout, ``transfer`` plans the moves, ``bounds`` says how good any plan
could be. No torch: a laptop can plan and price a reshard of a cluster.
"""
