"""Images: decoded, turned upright, converted to a model's colours, fitted to its input, drawn into, and class maps.

`decoder` does this for one file: `orientation` reads which way is up, `colors` converts grey and other pictures, and
`frame` says where the image lies in the model's input. `image_input` describes that input.
"""
