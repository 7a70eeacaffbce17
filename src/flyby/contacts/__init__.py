"""Who can talk to whom, and when: plans of contacts from orbits, from traces of movers, from other tools' files."""
