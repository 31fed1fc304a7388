"""A deterministic simulation of the whole system: `PYTHONPATH=tests python -m simulation --seeds 0-1999`.

Publishers, followers, a pruner and readers run their real code over one store, in one thread of control and in virtual
time (`scheduler`, `virtual`). A seed decides everything that happens by chance (`choices`): the faults of the store
(`store`), what processes do (`actors`, `ranks`), and when they sleep or die (`world`). A referee that knows the bits of
every version looks at each operation (`referee`). A seed that fails is run again with fewer faults until none can be
left out. `planted` has faults in our own code that the simulation must find.
"""
