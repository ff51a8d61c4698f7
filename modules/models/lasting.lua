--- Tensors that outlive every scope that is open, for what a model keeps between calls. Scopes belong to a coroutine,
-- so a tensor made in a new one is in none of them.

--- Calls fn(...) so, and returns what it returns.
return function(fn, ...) return coroutine.wrap(fn)(...) end
