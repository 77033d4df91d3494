"""Models: their sources, the meaning of their outputs, and the life of their versions in the repository.

- A load: `repository` enters its states, READY among them, `loader` brings a version up, `load_turns` lets one load run
  at a time, `growth` adds the buckets that the version did not wait for.
- A request: `version_lookup` finds the version that answers, by number, label or share.
- A model: `catalog` builds it, `network_settings` checks its buckets; `task` has the tasks, and `networks.reading`
  chooses the one of a network's outputs.

Nothing here knows a protocol. TensorFlow is imported only in `networks`, `sources` and `lowering`.
"""
