"""Triton's interpreter at twice its speed, with the same numbers: what it works out again at every operation is kept.

    at every launch, and call of a function in one    which functions of `triton.language` are builtins, by inspection
    of every intermediate value                       its shape as triton's tuple, its type with a name of many words

Most kernels of these tests run on small tensors, so that nearly all of their time is such bookkeeping and hardly any
is arithmetic. Where another version of triton is built otherwise, it is left as it is, and tests are only slower.
"""

import inspect
import math
from functools import cache


def install():
    """Make it so in this process; whether it could be done."""
    try:
        from triton import language
        from triton.language import core
        from triton.runtime import interpreter

        builtin, unwrap, constexpr = core.is_builtin, core._unwrap_if_constexpr, core.constexpr
        patch_lang, patch_attr = interpreter._patch_lang, interpreter._patch_attr
        scope_type, numpy_type = interpreter._LangPatchScope, interpreter._get_np_dtype
        assert callable(scope_type.restore)
        assert callable(interpreter._patch_builtin)
        block_init, value_init = core.block_type.__init__, core.base_value.__init__
        assert list(inspect.signature(core.tensor.__init__).parameters) == ["self", "handle", "type"]
        assert list(inspect.signature(block_init).parameters) == ["self", "element_ty", "shape"]
    except (ImportError, AttributeError, AssertionError):
        return False

    # Builtins of a module or class do not change; and what the launched kernel sees patched, its functions see too.
    patched = set()

    class Scope(scope_type):
        def restore(self):
            super().restore()
            patched.clear()

    @cache
    def builtins_of(package):
        return [(name, member) for name, member in inspect.getmembers(package) if builtin(member)]

    @cache
    def languages_of(fn):
        seen = [value for value in fn.__globals__.values() if inspect.ismodule(value)]
        return frozenset(value.__name__ for value in seen if value in (language, core))

    def patch_builtin(package, builder, scope):
        for name, member in builtins_of(package):
            patch_attr(package, name, member, builder, scope)

    def patch_once(fn):
        asked = languages_of(fn)
        if asked and asked <= patched:
            return Scope()
        scope = patch_lang(fn)
        patched.update(asked)
        return scope

    # The same shape has the same tuples, the same type the same name.
    @cache
    def shape_of(sides):
        return constexpr(math.prod(sides)), core.tuple([constexpr(side) for side in sides])

    def tensor_init(self, handle, kind):
        value_init(self)
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.numel, self.shape = shape_of(tuple(map(unwrap, kind.shape)) if kind.is_block() else ())

    types = {}

    def kept_block_init(self, element_ty, shape):
        if type(element_ty) is not core.dtype:
            block_init(self, element_ty, shape)
            return
        key = element_ty.name, *map(unwrap, shape)
        if key not in types:
            block_init(self, element_ty, shape)
            types[key] = dict(vars(self))
        vars(self).update(types[key])

    names = {}

    def kept_numpy_type(kind):
        while isinstance(kind, core.block_type):
            kind = kind.element_ty
        if isinstance(kind, core.pointer_type):
            return numpy_type(kind)
        if kind.name not in names:
            names[kind.name] = numpy_type(kind)
        return names[kind.name]

    interpreter._LangPatchScope = Scope
    interpreter._patch_builtin, interpreter._patch_lang = patch_builtin, patch_once
    interpreter._get_np_dtype = kept_numpy_type
    core.tensor.__init__, core.block_type.__init__ = tensor_init, kept_block_init
    return True
