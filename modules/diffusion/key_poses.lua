--- A policy of key poses: where the hand goes next is drawn by diffusion, whether it closes there is classified at the
-- place that was drawn, and a planner does the way. As Mini-Diffuser (Hu et al. 2025) has it: only the position is
-- diffused.
--
--     local agent = policy.KeyPoses(network, words)
--     agent:fit(examples, { steps = 600, samples = 16 })
--     local result = datasets.arm.trial(function(seen) return agent:act(seen, plan) end)
local ty = require "tycho"
local arguments = require "tycho.arguments"
local policy = require "tycho.diffusion.policy"
local processes = require "tycho.diffusion.process"

---@class KeyPoses
---@field network MiniDiffuser
---@field process Process
local KeyPoses = {}
KeyPoses.__index = KeyPoses
KeyPoses.__name = "KeyPoses"

--- network: with encode, denoise and classify, such as models.MiniDiffuser; words: of policy.words. options: process (a
-- DDPM of 100 steps whose samples lie in [-1, 1]), phrase (14: words of a task at most).
---@param network table
---@param words table
---@param options? {process?: Process, phrase?: integer}
---@return KeyPoses
local function new(network, words, options)
  arguments.expect("KeyPoses", "network", network, "a module")
  arguments.expect("KeyPoses", "words", words, "a table")
  local o = arguments.read("KeyPoses", options, { process = arguments.none, phrase = 14 }, { process = "a table",
    phrase = "an integer >= 1" })
  return setmetatable({ network = network, words = words, phrase = o.phrase,
    process = o.process or processes.DDPM { steps = 100, drop = 0 } }, KeyPoses)
end

-- What the network is given of rows of what was seen, on its device.
local function observation(self, images, words, states)
  local to = { device = self.network:device() }
  return { images = images:to(to):to "f32" / 127.5 - 1, words = words:to(to), states = states:to(to) }
end

--- Trains with examples as datasets.arm.examples gives them: { images u8, states, tasks, targets, hands, starts }. The
-- loss is the process's, of `samples` noised positions for each example, and a cross entropy of the hand at the true
-- position, moved a little (0.01, as the paper's code). options: steps (600), samples (16), batch (16: examples in a
-- step), lr (1e-3: the peak; warmed up over 50 steps, to 0 along a cosine), hand (0.1: weight of the cross entropy),
-- seed (0). Returns { loss, hand: means of the last tenth; seconds of a step }.
---@param examples table
---@param options? table
---@return {loss: number, hand: number, seconds: number}
function KeyPoses:fit(examples, options)
  local who = "KeyPoses:fit"
  arguments.expect(who, "examples", examples, "a table")
  for _, key in ipairs { "images", "states", "targets", "hands", "starts" } do
    arguments.expect(who, "examples." .. key, examples[key], "a tensor")
  end
  local o = arguments.read(who, options, { steps = 600, samples = 16, batch = 16, lr = 1e-3, hand = 0.1, seed = 0 },
    { steps = "an integer >= 1", samples = "an integer >= 1", batch = "an integer >= 1", lr = "a number > 0",
      hand = "a number >= 0", seed = "an integer" })
  local words, starts = self.words:encode(examples.tasks, self.phrase), examples.starts
  local episodes = starts.shape[1] - 1
  local device = self.network:device()
  local optimizer = ty.optim.AdamW(self.network:train():parameters(), { lr = o.lr, weight_decay = 0.01, clip_norm = 1,
    schedule = ty.optim.cosine { steps = o.steps, warmup = math.min(50, o.steps // 4) } })
  local result, counted = { loss = 0, hand = 0 }, 0
  ty.manual_seed(o.seed)
  local began = os.clock()
  for step = 1, o.steps do
    ty.scope(function()
      -- An episode, then one of its rows: tasks of few poses count as much as others.
      local episode = ty.randint(0, episodes, { o.batch })
      local from, to = starts:index_select(0, episode), starts:index_select(0, episode + 1)
      local rows = from + (ty.rand(o.batch) * (to - from)):floor():to "i64"
      local function take(x) return x:index_select(0, rows) end
      local targets, hands = take(examples.targets):to(device), take(examples.hands):to(device)
      local loss, condition = policy.loss(self.process, self.network,
        observation(self, take(examples.images), take(words), take(examples.states)), targets, { samples = o.samples })
      local logits = self.network:classify(targets + ty.randn_like(targets) * 0.01, condition)
      local hand = ty.nn.binary_cross_entropy_with_logits(logits, hands)
      optimizer:step(loss + hand * o.hand)
      if step > o.steps - math.max(1, o.steps // 10) then
        counted = counted + 1
        result.loss, result.hand = result.loss + loss:item(), result.hand + hand:item()
      end
    end)
  end
  result.seconds = (os.clock() - began) / o.steps
  result.loss, result.hand = result.loss / counted, result.hand / counted
  self.network:eval()
  return result
end

--- Draws where each hand goes next: targets f32 [n, 2] in [-1, 1] and hands f32 [n], above 0 where it closes. seen: of
-- datasets.arm.trial. options: steps (10, of the sampler), solver and others of Process:sample.
---@param seen {images: Tensor, states: Tensor, tasks: string[]}
---@param options? table
---@return Tensor targets
---@return Tensor hands
function KeyPoses:draw(seen, options)
  arguments.expect("KeyPoses:draw", "seen", seen, "a table")
  arguments.expect("KeyPoses:draw", "options", options, "a table or nil")
  local how = { steps = 10 }
  for key, value in pairs(options or {}) do how[key] = value end
  return ty.no_grad(function()
    local targets, condition = policy.draw(self.process, self.network,
      observation(self, seen.images, self.words:encode(seen.tasks, self.phrase), seen.states), { 2 }, how)
    return targets, self.network:classify(targets, condition)
  end)
end

--- What datasets.arm.trial asks for: draws the next poses and has them planned. plan(state, x, y, hand) returns the
-- actions [k, 4] from a state [4] to a place in [-1, 1] with the hand closed (1) or open (-1).
---@param seen table
---@param plan fun(state: Tensor, x: number, y: number, hand: integer): Tensor
---@param options? table  of draw
---@return Tensor[]
function KeyPoses:act(seen, plan, options)
  arguments.expect("KeyPoses:act", "plan", plan, "a function")
  local targets, hands = self:draw(seen, options)
  local list, closed = targets:to("cpu"):tolist(), hands:to("cpu"):tolist()
  for i, place in ipairs(list) do
    list[i] = plan(seen.states:select(0, i - 1), place[1], place[2], closed[i] > 0 and 1 or -1)
  end
  return list
end

return new
