"""Triton's interpreter at several times its speed, with the same numbers: what it works out again and again is kept.

    at every launch, and call of a function in one    which functions of `triton.language` are builtins, by inspection
    of every intermediate value                       its shape as triton's tuple, its type with a name of many words
    of every two that go together                     whether their shapes are the same, number by number
    of every sum and product of integers              whether it overflowed, which nothing asks but in TRITON_DEBUG
    of a reduction by a function of ours              the function, for each element: here for a slice of them, in order

Most kernels of these tests run on small tensors, so that nearly all of their time is such bookkeeping and hardly any
is arithmetic. Where another version of triton is built otherwise, it is left as it is, and tests are only slower.
"""

import dataclasses
import inspect
import math
from functools import cache, wraps

import numpy


def install():
    """Make it so in this process; whether it could be done."""
    try:
        from triton import language
        from triton.language import core, semantic
        from triton.runtime import interpreter

        builtin, unwrap, constexpr = core.is_builtin, core._unwrap_if_constexpr, core.constexpr
        patch_lang, patch_attr = interpreter._patch_lang, interpreter._patch_attr
        scope_type, numpy_type = interpreter._LangPatchScope, interpreter._get_np_dtype
        reduces, reduce_flat = interpreter.ReduceOps, interpreter.ReduceOps.generic_reduce
        builder, meaning = interpreter.interpreter_builder, semantic.TritonSemantic
        unchecked = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
        broadcast = meaning.broadcast_impl_value
        assert callable(scope_type.restore)
        assert callable(interpreter._patch_builtin)
        block_init, value_init = core.block_type.__init__, core.base_value.__init__
        assert list(inspect.signature(core.tensor.__init__).parameters) == ["self", "handle", "type"]
        assert list(inspect.signature(block_init).parameters) == ["self", "element_ty", "shape"]
        assert list(inspect.signature(broadcast).parameters) == ["self", "lhs", "rhs"]
        assert list(inspect.signature(reduce_flat).parameters) == ["self", "input"]
        assert list(inspect.signature(reduces.to_tensor).parameters) == ["self", "ret", "dtype"]
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

    types, shapes = {}, {}

    def kept_block_init(self, element_ty, shape):
        sides = tuple(map(unwrap, shape))
        key = element_ty.name, sides
        kept = types.get(key) if type(element_ty) is core.dtype else None
        if kept is None:
            block_init(self, element_ty, shape)
            self.shape = shapes.setdefault(sides, self.shape)
            if type(element_ty) is core.dtype:
                types[key] = dict(vars(self))
        else:
            vars(self).update(kept)

    @wraps(broadcast)
    def broadcast_others(self, lhs, rhs):
        one, other = lhs.type, rhs.type
        if one.is_block() and other.is_block() and one.shape is other.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    names = {}

    def kept_numpy_type(kind):
        while isinstance(kind, core.block_type):
            kind = kind.element_ty
        if isinstance(kind, core.pointer_type):
            return numpy_type(kind)
        if kind.name not in names:
            names[kind.name] = numpy_type(kind)
        return names[kind.name]

    @wraps(reduce_flat)
    def reduce_slices(self, parts):
        if self.axis is None:
            return reduce_flat(self, parts)
        kinds = [part.dtype for part in parts]
        slices = [numpy.moveaxis(part.handle.data, self.axis, 0) for part in parts]
        held = [numpy.array(part[0]) for part in slices]
        for others in zip(*(part[1:] for part in slices), strict=True):
            left, right = (map(self.to_tensor, values, kinds) for values in (held, others))
            found = self.combine_fn.fn(*left, *right)
            for number, one in zip(held, found if isinstance(found, tuple) else (found,), strict=True):
                number[...] = one.handle.data.reshape(number.shape) if isinstance(one, core.tensor) else one
        if self.keep_dims:
            held = [numpy.expand_dims(number, self.axis) for number in held]
        return list(map(self.to_tensor, held, kinds))

    builder.options, meaning.broadcast_impl_value = unchecked, broadcast_others
    interpreter._LangPatchScope = Scope
    reduces.generic_reduce = reduce_slices
    interpreter._patch_builtin, interpreter._patch_lang = patch_builtin, patch_once
    interpreter._get_np_dtype = kept_numpy_type
    core.tensor.__init__, core.block_type.__init__ = tensor_init, kept_block_init
    return True
