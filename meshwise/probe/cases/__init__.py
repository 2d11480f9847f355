"""The cases that each kind of ``measure`` times, in their order. No torch.

Every module has one function, ``cases(scope, ...)``, whose keyword arguments are the options that
this kind of measurement has on the command line and in ``meshwise.measure``.
"""
