"""The cases that each kind of ``measure`` times, in order. No torch.

Each kind's module has a function ``cases(scope, asked)``. ``asked`` holds the options of this kind
on the command line and in ``meshwise.measure``.
"""
