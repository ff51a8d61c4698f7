--- Image classification: require "tycho.vision".
local classify = require "tycho.vision.classify"

return {
  ResNet = require "tycho.models.resnet",
  fit = classify.fit,
  predict = classify.predict,
  accuracy = classify.accuracy,
  random_shift = classify.random_shift,
}
