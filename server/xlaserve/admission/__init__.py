"""Admission, as the questions that a call has to pass. Nothing here knows a protocol.

- Who calls: `authenticator`, by headers and connections. Callers (`caller`) are named in `callers_file`, by `tokens` or
  by `certificates`, which `watch` reads again; `address` and `hosts` tell which addresses and names are whose.
- May they: `method_access`, by the roles that a method asks for. What administrators do is in the `audit` log.
- How many calls at a time: `calls`.
- How large are they together: `message_memory` for messages, `image_memory` for images that are decoded.
- How often: `limits`, for each caller.

`shared_counts` has the counts that hold for all fronts together, `log_lines` bounds lines of refusals. The images that
one model may hold are bounded next to its queue, in `engine.batching.image_admission`.
"""
