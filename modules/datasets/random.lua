--- Random numbers of generated sets: a generator for each item, which depends on the set's seed, a stream and the
-- item's position alone, in integers of 64 bits. The same numbers come on every machine, whatever was drawn before.
local arguments = require "tycho.arguments"

local Random = {}
Random.__index = Random

local golden = 0x9e3779b97f4a7c15

-- SplitMix64's output function: Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators", with the
-- constants of Stafford's variant 13.
local function mix(z)
  z = (z ~ z >> 30) * 0xbf58476d1ce4e5b9
  z = (z ~ z >> 27) * 0x94d049bb133111eb
  return z ~ z >> 31
end

-- FNV-1a of a text, 64 bits.
local function hash(text)
  local h = -0x340d631b7bdddcdb -- 0xcbf29ce484222325
  for i = 1, #text do h = (h ~ text:byte(i)) * 0x100000001b3 end
  return h
end

--- A generator. Others of another seed, stream or position give numbers that have nothing to do with its own.
---@param seed integer
---@param stream integer|string what the numbers are for: a split, a part of an item
---@param i integer the item
local function new(seed, stream, i)
  if math.type(seed) ~= "integer" then arguments.expect("datasets.random.new", "seed", seed, "an integer") end
  if math.type(stream) ~= "integer" then
    arguments.expect("datasets.random.new", "stream", stream, "an integer or a string")
    stream = type(stream) == "string" and hash(stream) or math.tointeger(stream)
  end
  if math.type(i) ~= "integer" then arguments.expect("datasets.random.new", "i", i, "an integer") end
  local key = mix(math.tointeger(seed) + golden)
  key = mix((key ~ stream) + golden)
  key = mix((key ~ math.tointeger(i)) + golden)
  return setmetatable({ state = key }, Random)
end

--- 64 random bits.
---@return integer
function Random:bits()
  local state = self.state + golden
  self.state = state
  return mix(state)
end

--- A whole number from a to b, each as likely: Lemire 2019, "Fast Random Integer Generation in an Interval".
---@param a integer
---@param b integer at most 2^32 - 1 above a
---@return integer
function Random:integer(a, b)
  local low, high = math.tointeger(a), math.tointeger(b)
  local n = low and high and high - low + 1
  if not n or n < 1 or n > 0x100000000 or high < low then
    arguments.fail("Random:integer: a, b: expected integers with a <= b < a + 2^32, got %s, %s", arguments.describe(a),
      arguments.describe(b))
  end
  local product = (self:bits() >> 32) * n
  local rest = product & 0xffffffff
  if rest < n then
    local least = 0x100000000 % n
    while rest < least do
      product = (self:bits() >> 32) * n
      rest = product & 0xffffffff
    end
  end
  return low + (product >> 32)
end

--- A number in [0, 1), a multiple of 2^-53.
---@return number
function Random:number() return (self:bits() >> 11) * 0x1p-53 end

--- One of the elements of a list.
function Random:choose(list)
  if type(list) ~= "table" or #list == 0 then
    arguments.fail("Random:choose: list: expected a list with elements, got %s", arguments.describe(list))
  end
  return list[self:integer(1, #list)]
end

--- Puts the elements of a list into random order, in place; returns the list.
function Random:shuffle(list)
  arguments.expect("Random:shuffle", "list", list, "a list")
  for i = #list, 2, -1 do
    local k = self:integer(1, i)
    list[i], list[k] = list[k], list[i]
  end
  return list
end

return { new = new }
