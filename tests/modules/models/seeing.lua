-- What models that see and say are held to, beside what transformers computed (tests/fixtures/make_vision.py): logits,
-- loss and gradients, greedy text in a batch and row by row, a folder that is written and read again.
--
--   local seeing = dofile(folder .. "seeing.lua")(check, reference)
local ty = require "tycho"
local hub = require "tycho.hub"
require "tycho.llm" -- generation

return function(check, reference)
  local M = {}
  local compare = reference.compare

  --- The model of a fixture's folder in f32, of which nothing is left over, and what is expected of it.
  function M.load(folder, options)
    local o = { dtype = "f32" }
    for key, value in pairs(options or {}) do o[key] = value end
    local model = hub.load(folder, o)
    check.equal({ model.report.unexpected, model.report.missing, model.config.unknown }, { {}, {}, {} })
    return model, ty.io.load_safetensors(folder .. "/expected.safetensors")
  end

  --- Logits where tokens are seen, the loss with targets and without, and gradients, those of the pictures too.
  -- options: as the model takes them, without pictures. Returns the names of parameters that the reference says nothing
  -- of.
  function M.learns(model, want, options)
    local o = {}
    for key, value in pairs(options) do o[key] = value end
    o.pictures = want.x:detach():requires_grad_()
    local seen = want.mask:unsqueeze(-1):to "f32"
    compare(model(want.tokens, o) * seen, want.logits * seen, "logits")
    -- Targets are labels one place on.
    local n, t = want.labels.shape[1], want.labels.shape[2]
    local targets = ty.concat({ want.labels:narrow(1, 1, t - 1), ty.full({ n, 1 }, -100, { dtype = "i64" }) }, 1)
    local loss = model:loss(want.tokens, targets, o)
    check.close(loss:item(), want.ce:item(), 1e-4 * want.ce:item(), "loss")
    check.close(model:loss(want.tokens, nil, o):item(), loss:item(), 1e-5, "targets of its own")
    -- The fixture's figures are those of the loss times the first number of the wave.
    local left = reference.compare_gradients(model, loss * math.sin(1), want)
    compare(o.pictures.grad, want["input_grad.x"], "gradient for the pictures")
    return left
  end

  --- As learns(), where parts of the tower are not used: all that is left over is of it, and has no gradient.
  function M.learns_but_for_the_tower(model, want, options)
    local left, parameters = M.learns(model, want, options), {}
    for key, p in model:named_parameters() do parameters[key] = p end
    for key in pairs(left) do check.ok(key:find "^vision_tower%." and parameters[key].grad == nil, key) end
  end

  --- The greedy text of the reference, of all rows in a batch and of each alone. asked, mask: the tokens, padded on the
  -- left; all: how generate() is told of all pictures; alone: of each row's, a list.
  function M.says(model, want, asked, mask, all, alone)
    local t, count, rows = asked.shape[2], want.greedy.shape[2] - asked.shape[2], {}
    local function told(options)
      local o = { temperature = 0, stop_tokens = false }
      for key, value in pairs(options) do o[key] = value end
      return o
    end
    for i = 1, #alone do
      local padding = t - mask:select(0, i - 1):sum():item()
      rows[i] = asked:select(0, i - 1):narrow(0, padding, t - padding)
    end
    for i, row in ipairs(model:generate(rows, count, told(all))) do
      local length = rows[i].shape[1]
      local expected = want.greedy:select(0, i - 1):narrow(0, t - length, length + count):tolist()
      check.equal(row:tolist(), expected, "row " .. i .. " of a batch")
      local one = model:generate(rows[i]:unsqueeze(0), count, told(alone[i])):select(0, 0)
      check.equal(one:tolist(), expected, "row " .. i .. " alone")
    end
    return count
  end

  --- What generate() is told of the pictures of rows, { first, count } of each, where the parts of picture i end at
  -- at[i].
  function M.parts(want, at, pictures)
    local list = {}
    for i, some in ipairs(pictures) do
      local first, count = some[1], some[2]
      list[i] = count == 0 and {} or { pictures = want.x:narrow(0, at[first], at[first + count] - at[first]),
        sizes = want.sizes:narrow(0, first, count) }
    end
    return list
  end

  --- Writes the model into a folder and reads it again: the logits are the same. change(folder): before it is read, to
  -- what other versions write, whose config may have keys of its own.
  function M.comes_back(model, want, options, change)
    local path = os.tmpname()
    os.remove(path)
    model:save(path)
    if change then change(path) end
    local other = hub.load(path, { dtype = "f32" })
    check.equal({ other.report.unexpected, other.report.missing }, { {}, {} })
    if not change then check.equal(other.config.unknown, {}) end
    compare(other(want.tokens, options), model(want.tokens, options), "logits")
    for _, file in ipairs(ty.io.listdir(path)) do os.remove(path .. "/" .. file) end
    os.remove(path)
  end

  return M
end
