"""The compile cache: what a later start need not trace, compile or time again."""
