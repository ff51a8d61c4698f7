-- Comparing models with what their reference computed, as make_llm.py and make_diffusers.py of tests/fixtures write it:
--
--   local reference = dofile(folder .. "reference.lua")(check)      check: of tests/lua/check.lua
local ty = require "tycho"

return function(check)
  local M = { TOLERANCE = 1e-4 }

  --- Largest difference relative to the largest magnitude.
  function M.compare(got, want, what)
    check.equal(got.shape, want.shape, what .. " shape")
    local scale = math.max(want:abs():max():item(), 1e-30)
    local off = (got:to "f64" - want:to "f64"):abs():max():item() / scale
    check.ok(off <= M.TOLERANCE, ("%s: relative error %.2g"):format(what, off))
  end

  --- A model of tests/fixtures/vision in f32, of which nothing is missing, left over or unknown, and what the reference
  --- expects of it.
  function M.vision(name, options)
    local folder, o = check.root .. "tests/fixtures/vision/" .. name, { dtype = "f32" }
    for key, value in pairs(options or {}) do o[key] = value end
    local model = require("tycho.hub").load(folder, o)
    check.equal({ model.report.unexpected, model.report.missing, model.config.unknown }, { {}, {}, {} }, name)
    return model, ty.io.load_safetensors(folder .. "/expected.safetensors")
  end

  --- sin(0.37 i + 1) over all elements in their order, f64, shaped like t.
  function M.wave(t) return (ty.arange(t:numel(), { dtype = "f64" }) * 0.37 + 1):sin():reshape(t.shape) end

  --- Norms and products with a wave of all gradients; every one that the reference has must be there.
  function M.compare_gradients(model, loss, want, prefix)
    local parameters, left = {}, {}
    for name, p in model:named_parameters() do
      parameters[name] = p
      left[name] = true
    end
    model:zero_grad()
    loss:backward()
    local largest = 0
    for name, pair in pairs(want) do
      if name:match "^grad" then largest = math.max(largest, pair:tolist()[1]) end
    end
    local floor = 1e-6 * largest -- some gradients are 0 but for rounding: those of the biases of BERT's keys
    for name, pair in pairs(want) do
      local key = name:match "^grad%.(.*)$"
      if key then
        key = key:gsub("^" .. (prefix or "$"), "")
        key = not parameters[key] and model.rename and model:rename(key) or key
        local p = parameters[key]
        left[key] = nil
        if check.ok(p, "a parameter " .. key) then
          local g = (p.grad or ty.zeros(p.shape)):to "f64" -- the reference has zeros where nothing depends on it
          local norm, product = pair:tolist()[1], pair:tolist()[2]
          local got = g:square():sum():sqrt():item()
          check.ok(math.abs(got - norm) <= M.TOLERANCE * norm + floor,
            ("gradient of %s: norm %.8g, not %.8g"):format(key, got, norm))
          got = (g * M.wave(g)):sum():item()
          check.ok(math.abs(got - product) <= M.TOLERANCE * norm + floor,
            ("gradient of %s: product %.8g, not %.8g"):format(key, got, product))
        end
      end
    end
    return left
  end

  return M
end
