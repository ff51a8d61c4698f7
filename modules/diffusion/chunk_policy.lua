--- A policy of chunks: several actions in a row are drawn by diffusion, the first of them are done before it looks
-- again (receding horizon). Chi et al. 2023, "Diffusion Policy", sections 2 and 3.
--
--     local agent = diffusion.ChunkPolicy(network, { horizon = 8, execute = 4 })
--     agent:fit({ observation = { images = x, words = w, states = s }, actions = a }, { steps = 500 })
--     local actions = agent:act { images = x, words = w, states = s }       -- [n, 4, size of an action]
local ty = require "tycho"
local arguments = require "tycho.arguments"
local policy = require "tycho.diffusion.policy"
local processes = require "tycho.diffusion.process"

---@class ChunkPolicy
---@field network table
---@field process Process
local ChunkPolicy = {}
ChunkPolicy.__index = ChunkPolicy
ChunkPolicy.__name = "ChunkPolicy"

--- network: with encode and denoise. options: process (a DDPM of 100 steps whose samples lie in [-1, 1]), horizon (8:
-- actions of a chunk), execute (4: of these, done before the next look), actions (4: numbers of an action), prepare (a
-- function of an observation's rows that gives what the network sees: from bytes to numbers, say).
---@param network table
---@param options? table
---@return ChunkPolicy
local function new(network, options)
  arguments.expect("ChunkPolicy", "network", network, "a module")
  local none = arguments.none
  local o = arguments.read("ChunkPolicy", options, { process = none, horizon = 8, execute = 4, actions = 4,
    prepare = none }, { process = "a table", horizon = "an integer >= 1", execute = "an integer >= 1",
    actions = "an integer >= 1", prepare = "a function" })
  if o.execute > o.horizon then
    arguments.fail("ChunkPolicy: execute: expected at most the horizon, %d, got %d", o.horizon, o.execute)
  end
  return setmetatable({ network = network, horizon = o.horizon, execute = o.execute, actions = o.actions,
    prepare = o.prepare or function(x) return x end,
    process = o.process or processes.DDPM { steps = 100, drop = 0 } }, ChunkPolicy)
end

-- What the network sees of an observation's rows, where it is.
local function prepared(self, observation)
  local there, moved = { device = self.network:device() }, {}
  for key, x in pairs(observation) do moved[key] = ty.is_tensor(x) and x:to(there) or x end
  return self.prepare(moved)
end

--- Trains with { observation (a table of tensors [n, ...]), actions [n, horizon, numbers] }. options: steps (500),
-- samples (4: pairs of noise and time for each chunk), batch (64), lr (1e-3: the peak; warmed up, then along a cosine),
-- seed (0), optimizer (a function of the network and { lr, schedule, clip_norm } that makes one in place of AdamW).
-- Returns { loss: the mean of the last tenth, seconds: of a step }.
---@param examples {observation: table, actions: Tensor}
---@param options? table
---@return {loss: number, seconds: number}
function ChunkPolicy:fit(examples, options)
  local who = "ChunkPolicy:fit"
  arguments.expect(who, "examples", examples, "a table")
  arguments.expect(who, "examples.observation", examples.observation, "a table")
  arguments.expect(who, "examples.actions", examples.actions, "a tensor")
  local o = arguments.read(who, options, { steps = 500, samples = 4, batch = 64, lr = 1e-3, seed = 0,
    optimizer = arguments.none }, { steps = "an integer >= 1", samples = "an integer >= 1", batch = "an integer >= 1",
    lr = "a number > 0", seed = "an integer", optimizer = "a function" })
  local n = examples.actions.shape[1]
  local make = o.optimizer or function(network, how)
    how.weight_decay = 0.01
    return ty.optim.AdamW(network:parameters(), how)
  end
  local optimizer = make(self.network:train(), { lr = o.lr, clip_norm = 1,
    schedule = ty.optim.cosine { steps = o.steps, warmup = math.min(50, o.steps // 4) } })
  local result, counted = { loss = 0 }, 0
  ty.manual_seed(o.seed)
  local began = os.clock()
  for step = 1, o.steps do
    ty.scope(function()
      local rows, observation = ty.randint(0, n, { o.batch }), {}
      local function take(x) return x:index_select(0, rows:to { device = x.device }) end
      for key, x in pairs(examples.observation) do observation[key] = take(x) end
      local loss = policy.loss(self.process, self.network, prepared(self, observation),
        take(examples.actions):to { device = self.network:device() }, { samples = o.samples })
      optimizer:step(loss)
      if step > o.steps - math.max(1, o.steps // 10) then
        counted, result.loss = counted + 1, result.loss + loss:item()
      end
    end)
  end
  result.seconds, result.loss = (os.clock() - began) / o.steps, result.loss / counted
  self.network:eval()
  return result
end

--- Chunks [n, horizon, numbers] for observations, in [-1, 1]. options: of Process:sample (steps 10, seeds ...).
---@param observation table
---@param options? table
---@return Tensor
function ChunkPolicy:draw(observation, options)
  arguments.expect("ChunkPolicy:draw", "observation", observation, "a table")
  arguments.expect("ChunkPolicy:draw", "options", options, "a table or nil")
  local how = { steps = 10 }
  for key, value in pairs(options or {}) do how[key] = value end
  return (policy.draw(self.process, self.network, prepared(self, observation), { self.horizon, self.actions }, how))
end

--- The actions to be done before the next look: the first `execute` of a chunk, [n, execute, numbers].
---@param observation table
---@param options? table  of draw
---@return Tensor
function ChunkPolicy:act(observation, options) return self:draw(observation, options):narrow(1, 0, self.execute) end

return new
