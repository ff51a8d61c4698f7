-- Superpipeline: whatever the two knobs are, outputs are those of the model, no more than the window is on the device,
-- as much as was asked for is loaded ahead, and then nothing waits for what was not begun.
local here = (arg and arg[0]:match ".*/" or "tests/modules/offload/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local offload = require "tycho.offload"
local llm = require "tycho.llm"
local nn, optim = ty.nn, ty.optim

local function llama(seed)
  ty.manual_seed(seed)
  return llm.Llama { vocab_size = 96, hidden_size = 32, intermediate_size = 64, num_hidden_layers = 5,
    num_attention_heads = 4, num_key_value_heads = 4, max_position_embeddings = 32, tie_word_embeddings = seed == 2 }
end

local function plan(o) return { parameters = "host", smallest = 256, policy = offload.superpipeline(o) } end

local tokens = ty.randint(0, 96, { 2, 12 })

for seed = 1, 2 do
  check.test("outputs and the window, " .. (seed == 2 and "a tied head" or "a head of its own"), function()
    local model = llama(seed)
    local wanted = ty.no_grad(function() return model(tokens) end)
    for window = 1, 7 do
      for ahead = 0, window - 1 do
        local o = plan { window = window, ahead = ahead }
        local before = o.policy.before_forward
        local engine
        local most, coming, count = 0, 0, 0
        function o.policy.before_forward(self, unit, at)
          before(self, unit, at)
          local resident, begun = {}, {}
          for _, one in ipairs(engine.units) do
            for _, cell in ipairs(one.cells) do
              if cell.state == "here" then resident[one] = true
              elseif cell.state == "coming" then begun[one] = true end
            end
          end
          local n, m = 0, 0
          for _ in pairs(resident) do n = n + 1 end
          for one in pairs(begun) do if not resident[one] then m = m + 1 end end
          most, coming, count = math.max(most, n + m), math.max(coming, m), count + 1
          check.ok(resident[unit] and not begun[unit], "the unit that runs is here")
        end
        engine = offload.engine(model, nil, o)
        for _ = 1, 2 do
          check.ok(engine:run(function() return model(tokens) end):equal(wanted), ("%d, %d"):format(window, ahead))
        end
        local stalls = engine:stats().stalls
        check.ok(engine:run(function() return model(tokens) end):equal(wanted))
        if ahead > 0 then check.equal(engine:stats().stalls, stalls, "nothing is waited for that was not begun") end
        -- a tied head asks for the embedding beside the window
        check.ok(most <= window + (seed == 2 and 1 or 0), ("%d units of %d"):format(most, window))
        check.ok(coming >= math.min(ahead, 1), "loaded ahead")
        check.ok(count >= 18)
        engine:close()
      end
    end
  end)
end

check.test("generation with a cache, token by token", function()
  local model = llama(2)
  local wanted = model:generate(tokens, 8, { temperature = 0 })
  local engine = offload.engine(model, nil, plan { window = 2, ahead = 1 })
  check.ok(engine:run(function() return model:generate(tokens, 8, { temperature = 0 }) end):equal(wanted))
  engine:close()
  check.ok(model:generate(tokens, 8, { temperature = 0 }):equal(wanted), "and without the engine again")
end)

check.test("training, for every pair of knobs", function()
  local function train(o)
    local model = llama(1)
    local optimizer = optim.AdamW(model, { lr = 1e-2, clip_norm = 1 })
    local engine = o and offload.engine(model, optimizer, o)
    local losses = {}
    for i = 1, 3 do
      local function loss()
        return nn.cross_entropy(model(tokens:narrow(1, 0, 11)):reshape(-1, 96), tokens:narrow(1, 1, 11):reshape(-1))
      end
      if engine then losses[i] = engine:step(loss)
      else
        ty.scope(function()
          local l = loss()
          optimizer:step(l)
          losses[i] = l:item()
        end)
      end
    end
    if engine then engine:close() end
    return losses, model:parameters()
  end
  local losses, parameters = train()
  for window = 1, 5 do
    for ahead = 0, window - 1 do
      local o = plan { window = window, ahead = ahead }
      o.moments = "host"
      local other, theirs = train(o)
      check.equal(other, losses, ("%d, %d"):format(window, ahead))
      for i, p in ipairs(parameters) do check.ok(p:equal(theirs[i])) end
    end
  end
end)

check.test("wrong arguments", function()
  check.fails(function() offload.superpipeline { window = 0 } end, "window: expected an integer >= 1, got 0")
  check.fails(function() offload.superpipeline { window = 3, ahead = 3 } end, "ahead: expected less than window (3)")
  check.fails(function() offload.superpipeline { width = 3 } end, "width")
end)

check.test("bytes that a model and its optimizer have on the device", function()
  local model = ty.nn.Linear(10, 4)
  local optimizer = ty.optim.AdamW(model, { lr = 0.1 })
  check.equal({ offload.resident(model), offload.resident(model, optimizer) }, { 176, 176 })
  optimizer:step(model(ty.ones(1, 10)):sum())
  check.ok(offload.resident(model, optimizer) >= 3 * 176, "two moments")
  check.equal(offload.resident(model:to "meta"), 0)
  check.fails(function() offload.resident(3) end, "offload.resident: model: expected a module, got 3")
  check.fails(function() offload.resident(model, {}) end, "optimizer: expected one of ty.optim, got")
end)

check.finish()
