--- A network that says what is in front at each place of a picture of the arm, and where the joints are: geometric
-- features for policies, small enough to be trained where it is wanted. The simulator knows the answers; who uses the
-- features sees pictures alone.
--
--     local network = zoo.geometry.kept("runs/base", { steps = 400, episodes = 500 })
--     local features = network:features(zoo.arm.pictures(images))           -- [n, 64, width]
--     print(zoo.geometry.measure(network).front)
local ty = require "tycho"
local arguments = require "tycho.arguments"
local arm = require "tycho.zoo.arm"
local datasets = require "tycho.datasets"
local models = require "tycho.models"

local M = {}

-- Steps on four looks at each of the expert's episodes.
local function train(network, o)
  local seen = datasets.arm.chunks { episodes = o.episodes, looks = 4, geometry = true, seed = 1 }
  local optimizer = ty.optim.AdamW(network:parameters(), { lr = 2e-3,
    schedule = ty.optim.cosine { steps = o.steps, warmup = math.min(20, o.steps // 4) } })
  for _, _, log in ty.train.steps(nil, o.steps, { title = "geometry", quiet = o.quiet }) do
    local rows = ty.randint(0, seen.images.shape[1], { o.batch })
    local front, points = network(arm.pictures(seen.images:index_select(0, rows), o.device))
    local loss = ty.nn.cross_entropy(front:permute(0, 2, 3, 1):reshape(-1, #datasets.arm.layers),
      seen.front:index_select(0, rows):flatten():to(o.device))
      + (points - seen.points:index_select(0, rows):to(o.device)):square():mean() * 5
    optimizer:step(loss)
    log { loss = loss:item() }
  end
  return network
end

--- The network, trained on episodes of the expert, or read from the folder. options: steps (400), episodes (500), batch
-- (32), seed (0), device ("cpu"), quiet (false).
---@param folder string
---@param options? { steps?: integer, episodes?: integer, batch?: integer, seed?: integer, device?: string,
---  quiet?: boolean }
---@return GeometryNet
function M.kept(folder, options)
  local who = "zoo.geometry.kept"
  arguments.expect(who, "folder", folder, "a string")
  local count = "an integer >= 1"
  local o = arguments.read(who, options, { steps = 400, episodes = 500, batch = 32, seed = 0, device = "cpu",
    quiet = false }, { steps = count, episodes = count, batch = count, seed = "an integer" })
  local network = ty.data.with_seed(o.seed, function()
    return ty.nn.with_defaults({ device = o.device }, function() return models.GeometryNet() end)
  end)
  local path = ("%s/geometry-%d-%d-%d.safetensors"):format(folder, o.episodes, o.steps, o.seed)
  return ty.train.kept(path, network, function()
    return ty.data.with_seed(o.seed, function() return train(network, o) end)
  end)
end

--- How well it sees episodes that it was not trained on: the share of places where it names what is in front, and how
-- far key points are off, of half a picture's side, in the mean. episodes (60): two looks at each.
---@param network GeometryNet
---@param episodes? integer
---@return { front: number, points: number }
function M.measure(network, episodes)
  local who = "zoo.geometry.measure"
  arguments.expect(who, "network", network, "a module")
  episodes = arguments.expect(who, "episodes", episodes, "an integer >= 1 or nil") or 60
  local unseen, device = datasets.arm.chunks { split = "validation", episodes = episodes, looks = 2, geometry = true },
    network:device()
  return ty.no_grad(function()
    local front, points = network(arm.pictures(unseen.images, device))
    return { front = front:argmax(1):eq(unseen.front:to(device)):to("f32"):mean():item(),
      points = (points - unseen.points:to(device)):abs():mean():item() }
  end)
end

return M
