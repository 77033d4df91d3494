"""The contracts: `.proto` files, whose comments are the documentation of the API, and the stubs made from them."""
