"""stub"""
class _D:
    names=()
    def wrap(self,c): return c
def defer_outputs(gm): return _D()
